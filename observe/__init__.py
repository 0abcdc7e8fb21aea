"""Watches the engine and decides nothing: logs, metrics, journal, tracing, live feed, sanitizer."""
