"""Arguments that callers give: checked before anything begins."""
