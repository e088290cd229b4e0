"""Sampling under a task's constraint in vLLM, colocated with the trainer or as a server."""
