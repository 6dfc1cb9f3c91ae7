"""OpenAI's HTTP API, and what operators' tools ask for by HTTP: /health, /ready, /metrics."""
