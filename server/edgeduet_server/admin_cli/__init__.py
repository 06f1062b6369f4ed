"""``edgeduet-admin``: the control plane of a server, from anywhere; talks to its admin service and nothing else."""
