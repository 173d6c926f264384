"""Small programs that use daskinfer: ``python -m examples.analysis`` and so on."""
