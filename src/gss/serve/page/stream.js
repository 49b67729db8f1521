// Talks to the server: what the model is, and completions as they come.

export class ServerError extends Error {
  constructor(status, message, after) {
    super(message);
    this.status = status;
    this.after = after;
  }
}

let key = "";

export function useKey(value) {
  key = value.trim();
}

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  let message = `the server answered with ${response.status}`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // not ours: the status has to do
  }
  return new ServerError(response.status, message, Number(response.headers.get("Retry-After")) || 0);
}

export async function aboutModel() {
  const response = await fetch("v1/model", { headers: headers() });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Yields the chunks of a completion; ends when the server is done, throws ServerError, or AbortError when stopped.
export async function* complete(request, signal) {
  const response = await fetch("v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(request),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError(0, "the connection ended before the text did");
    waiting += decoder.decode(value, { stream: true });
    const events = waiting.split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(500, chunk.error.message || "the server failed");
      yield chunk;
    }
  }
}

// What went wrong, to a person.
export function explain(error) {
  if (!(error instanceof ServerError)) {
    return error instanceof TypeError
      ? "Cannot reach the server. Is it running? The text so far is still here."
      : `Something went wrong on this page: ${error.message}`;
  }
  const said = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  if (error.status === 401) return key ? "The server does not accept this API key." : "This server needs an API key.";
  if (error.status === 429) return `The server is busy. Try again in ${error.after || 1} s.`;
  return `${said}.`.replace("..", ".");
}
