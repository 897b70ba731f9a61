"""The model itself: every file here is copied into the published Hub repository, and nothing else is."""
