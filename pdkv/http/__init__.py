"""An OpenAI-compatible HTTP front of a router or a decode node: what it takes, what it answers, who may ask.

Guarantees: HTTP is parsed by aiohttp and by nobody else; nothing of it, and nothing of tokenizers, is imported unless a
service was given an address for it; a request runs as one over gRPC does, and ends at once when its client goes away.
"""
