"""The hooks of tp-data for the registry; they import the heavy modules when they are called."""

tp_contract = 1
