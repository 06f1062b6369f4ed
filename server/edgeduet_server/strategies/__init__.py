"""Every method, one file each; :mod:`edgeduet_server.strategies.catalogue` lists them."""
