"""Elastic KV memory below an engine that numbers its blocks itself: what is the same for every engine.

An engine has numbers for as many blocks as it may ever use. `allocation` puts its KV into memory of kvik, `slabs` says which blocks
get memory together, `slab_memory` takes it, and `mapper` does so beside the engine's steps. `balloon` holds blocks that have none, so
that the engine does not use them, `lease` lets memory of its prefix cache go while it sleeps, and `arrivals` tells the engine at once
what has come.
"""
