"""Commands of `python server.py` beside serving: conversations in the terminal, and files of requests."""
