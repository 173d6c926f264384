"""What daskinfer promises about speed, measured: ``python -m benchmarks``."""
