"""A model behind HTTP: continuous batching over states, and an OpenAI-compatible interface in front of it.

    engine.py        the thread that runs `gss.decode.Engine`: a queue in, pieces of text out
    job.py, row.py   what the thread is asked for, and one continuation under way as text
    app.py           the routes, with completions.py, chat.py, checks.py and schemas.py; about.py: the limits, and what
                     the model is; service.py: what all of them work with
    http.py          keys, hosts and bodies, before any route; how failures are answered; metrics.py counts
    connections.py   silent clients and such as do not read are closed
    server.py        the process: socket, engine, uvicorn, an orderly end
    page/            the playground

Nothing here is imported by the rest of the package but the command `gss serve`.
"""
