"""What a server and a device both need to keep programs running: start, watch, log, restart, end."""
