"""A simulated cluster that runs the real batching and placement policies.

Virtual clock, arrivals of a linear congruential generator: every result is exact, on
every machine. Times are seconds.
"""
