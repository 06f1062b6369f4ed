"""One module per revision, oldest first; none is ever changed after a release."""
