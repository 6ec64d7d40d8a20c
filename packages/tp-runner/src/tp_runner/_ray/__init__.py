"""Workers that are actors on a Ray cluster: the engine `ray`, which the registry finds by its hook."""
