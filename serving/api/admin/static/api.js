// The server's API: requests with the user's key, errors in its words, server-sent events.

const KEY = "weft-api-key";
const LOST = "The connection was lost before the answer’s end.";

/** What the server says of a request that it refused, or could not answer. */
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null }) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

/** The key that goes with every request; kept as long as the tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value.trim()),
};

/** The address of a path of the API, which is beside the page. */
export const address = (path) => new URL(path, document.baseURI).href;

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(address(path), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server does not answer." });
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const text = await response.text();
  try {
    return new ApiError(response.status, JSON.parse(text).error);
  } catch {
    return new ApiError(response.status, { message: text || response.statusText });
  }
}

export async function get(path) {
  return (await request(path)).json();
}

/** POST a body; yields the JSON of each event of the stream, up to [DONE]. */
export async function* stream(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const content = JSON.parse(data);
    if (content.error) throw new ApiError(response.status, content.error);
    yield content;
  }
  throw new ApiError(0, { message: LOST });
}

// The data of each event: HTML standard, section 9.2.6.
async function* events(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(lost);
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection is closed already
  }
}

function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, { message: LOST });
}

/** The request as a command for a terminal; the key is left to the environment. */
export function asCurl(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const lines = [`curl ${quoted(address(path))}`, "-H 'Content-Type: application/json'"];
  if (key.get()) lines.push('-H "Authorization: Bearer $WEFT_API_KEY"');
  lines.push(`--no-buffer -d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ");
}
