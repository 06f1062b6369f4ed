"""``python -m edgeduet_client``: the command line, also where no script is installed."""

from edgeduet_client.cli import main

main()
