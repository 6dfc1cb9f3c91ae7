"""Who may call, and how much: API keys and their limits."""
