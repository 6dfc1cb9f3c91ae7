"""``blink bench``: open-loop load on Blink or any OpenAI-compatible server, and what came of it (docs/bench.md)."""
