"""The engine in a process of its own, several engines, several hosts, and the clients that speak to them."""
