"""Executors other than those of one host: Ray's and torchrun's."""
