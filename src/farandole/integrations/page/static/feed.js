// The feed of server-sent events, read with fetch(): EventSource cannot send the token in a header.

const AGAIN_MS = [200, 500, 1000, 2000, 5000];

/**
 * Follows the feed for ever, and continues after a break at the last message.
 * @param {() => string} token the token, empty without one
 * @param {(kind: string, data: object) => void} onMessage
 * @param {(problem: string) => void} onContact "" when messages come, else why not; "token" when the token is wanted
 */
export async function follow(token, onMessage, onContact) {
  let lastId = "";
  let failures = 0;
  for (;;) {
    try {
      const headers = { Accept: "text/event-stream" };
      if (token()) headers.Authorization = `Bearer ${token()}`;
      if (lastId) headers["Last-Event-ID"] = lastId;
      const response = await fetch("/feed", { headers, cache: "no-store" });
      if (response.status === 401) {
        onContact("token");
        await tokenGiven();
        continue;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      onContact("");
      failures = 0;
      for await (const message of messagesOf(response.body)) {
        lastId = message.id || lastId;
        onMessage(message.kind, JSON.parse(message.data));
      }
      onContact("the page's server has ended the connection");
    } catch (error) {
      onContact("the page's server does not answer");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS[Math.min(failures++, AGAIN_MS.length - 1)]));
  }
}

let onToken = () => {};

/** Continues a feed that waits for the token. */
export function retry() {
  onToken();
}

function tokenGiven() {
  return new Promise((resolve) => { onToken = resolve; });
}

// The format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
async function* messagesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const message = { kind: "message", id: "", data: "" };
      for (const line of part.split("\n")) {
        const at = line.indexOf(": ");
        if (at <= 0) continue;
        const [field, content] = [line.slice(0, at), line.slice(at + 2)];
        if (field === "event") message.kind = content;
        else if (field === "id") message.id = content;
        else if (field === "data") message.data += content;
      }
      if (message.data) yield message;
    }
  }
}
