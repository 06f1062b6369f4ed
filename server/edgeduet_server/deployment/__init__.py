"""The coordinator as a service: certificates, Flower's SuperLink, a proxy, and what keeps them running."""
