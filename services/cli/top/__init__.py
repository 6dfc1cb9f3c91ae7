"""``blink top``: engine, lanes, latency, endings and losses of an instance, live, out of its metrics."""
