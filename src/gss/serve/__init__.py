"""A model behind HTTP: continuous batching over states, and an OpenAI-compatible interface in front of it.

    engine.py        the thread that runs `gss.decode.Engine`: a queue in, pieces of text out
    job.py           what the thread is asked for, and one continuation on its way from tokens to text
    app.py           the routes; completions.py: completions and chats; schemas.py: requests and answers;
                     about.py: the limits, and what the model is
    http.py          keys, hosts and bodies, before any route; how failures are answered; metrics.py counts
    server.py        the process: socket, engine, uvicorn, which connections may stay, an orderly end
    page/            the playground

Nothing here is imported by the rest of the package, except by the command `gss serve`.
"""
