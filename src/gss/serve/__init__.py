"""A model behind HTTP: continuous batching over states, and an OpenAI-compatible interface in front of it.

    engine.py        the thread that runs `gss.decode.Engine`: jobs in, pieces of text out
    app.py           the routes; completions.py: completions and chats; schemas.py: requests and responses;
                     about.py: the limits, and facts about the model
    http.py          checks of keys, hosts and bodies before any route; error responses; metrics.py: counters
    server.py        the process: socket, engine, uvicorn, connection limits, orderly shutdown
    page/            the playground

Nothing else in the package imports this, except the command `gss serve`.
"""
