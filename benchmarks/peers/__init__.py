"""Headrace and its peers: the same work in the same memory, each in a process and a memory group of its own."""
