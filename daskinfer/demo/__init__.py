"""Handwritten digits on a local cluster: ``python -m daskinfer.demo``."""
