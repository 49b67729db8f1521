"""A model behind HTTP: continuous batching over states, and an OpenAI-compatible interface in front of it.

    engine.py        the thread that runs the model: sequences join and leave the batch between steps
    reading.py       prompts, read in pieces between steps; prefix_cache.py keeps the states of what was read
    job.py, row.py   what the engine is asked for, and one continuation under way; choosing.py gives it its tokens
    app.py           the routes, with completions.py, checks.py, schemas.py; about.py: the limits, and what the model is
    http.py          keys, hosts and bodies, before any route; how failures are answered; metrics.py counts
    connections.py   silent clients and such as do not read are closed
    server.py        the process: socket, engine, uvicorn, an orderly end
    page/            the playground

Nothing here is imported by the rest of the package but the command `gss serve`.
"""
