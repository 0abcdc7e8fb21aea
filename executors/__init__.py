"""The executor for ranks that torchrun starts, also on several hosts; and which executor is chosen."""
