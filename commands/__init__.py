"""What `python server.py COMMAND` does beside serving: conversations in the terminal, and files of requests."""
