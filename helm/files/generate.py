"""Run by `helm test`: request tokens from the server, and exit with 1 if there are none.

Arguments: the server's URL and, optionally, the file with API keys.
"""

import json
import sys
import urllib.request


def ask(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """The server's JSON; HTTPError if it refuses."""
    headers = {"content-type": "application/json"}
    if len(sys.argv) > 2:
        with open(sys.argv[2], encoding="utf-8") as file:
            lines = [line.split() for line in file if line.strip() and line.strip()[0] != "#"]
        headers["authorization"] = f"Bearer {lines[0][0]}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=300) as answer:
        return json.load(answer)


base = sys.argv[1]
model = ask(f"{base}/v1/models")["data"][0]["id"]
body = {"model": model, "prompt": "What is 47 + 85?", "max_tokens": 8, "temperature": 0}
done = ask(f"{base}/v1/completions", body)
print(json.dumps(done, indent=2))
sys.exit(done["usage"]["completion_tokens"] < 1)
