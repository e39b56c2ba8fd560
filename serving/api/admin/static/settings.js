// The settings form: what it says as fields of a request, and what is wrong with it.

import { key } from "./api.js";
import { find } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

const EXAMPLES = {
  schema: {
    type: "object",
    properties: { city: { type: "string" }, population: { type: "integer" } },
    required: ["city", "population"],
    additionalProperties: false,
  },
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather of a city",
        parameters: {
          type: "object",
          properties: { city: { type: "string" } },
          required: ["city"],
        },
      },
    },
  ],
};

const CHECKS = { schema: checkSchema, tools: checkTools };

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function checkSchema(schema) {
  if (!isObject(schema)) return "A schema is a JSON object.";
  if (!schema.type && !schema.$ref && !schema.anyOf && !schema.enum && !schema.const) {
    return "The schema has no type.";
  }
  return "";
}

function checkTools(tools) {
  if (!Array.isArray(tools) || !tools.length) return "Tools are a list of at least one tool.";
  for (const [i, tool] of tools.entries()) {
    if (tool?.type !== "function") return `[${i}].type must be "function".`;
    if (typeof tool.function?.name !== "string") return `[${i}].function.name is missing.`;
    const parameters = tool.function.parameters;
    if (parameters !== undefined && !isObject(parameters)) {
      return `[${i}].function.parameters must be a JSON schema.`;
    }
  }
  return "";
}

/** The value of a field of JSON; undefined when it is empty or wrong, which it then says. */
function json(id) {
  const field = find(id);
  let value;
  let wrong = "";
  if (field.value.trim()) {
    try {
      value = JSON.parse(field.value);
      wrong = CHECKS[id](value);
    } catch (error) {
      wrong = `Not JSON: ${error.message}`;
    }
  } else if (id === "schema") {
    wrong = "A schema is missing.";
  }
  find(`${id}-error`).textContent = wrong;
  if (wrong) field.setAttribute("aria-invalid", "true");
  else field.removeAttribute("aria-invalid");
  return wrong ? undefined : value;
}

/** Fields for the body of a chat completion. Those that are wrong are marked, and not in it. */
export function fields() {
  const body = {};
  for (const name of NUMBERS) {
    const field = find(name);
    if (field.value !== "") body[name] = Number(field.value);
    if (field.validity.badInput) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
  if (find("logprobs").checked) {
    body.logprobs = true;
    body.top_logprobs = Number(find("top_logprobs").value);
  }
  const format = find("format").value;
  if (format === "json_object") body.response_format = { type: format };
  if (format === "json_schema") {
    const schema = json("schema");
    body.response_format = { type: format, json_schema: { name: "answer", strict: true, schema } };
  } else {
    find("schema").removeAttribute("aria-invalid");
  }
  const tools = json("tools");
  if (tools) {
    body.tools = tools;
    if (find("tool_choice").value) body.tool_choice = find("tool_choice").value;
  }
  return body;
}

/** The first field that is wrong, as of the last `fields`. */
export const wrong = () => find("settings-form").querySelector("[aria-invalid]");

/** The system prompt as messages: one or none. */
export function systemMessages() {
  const content = find("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** Make the form work; `onKey` is called when the key has changed. */
export function start(onKey) {
  find("key").value = key.get();
  find("key").addEventListener("change", () => {
    key.set(find("key").value);
    onKey();
  });
  find("format").addEventListener("change", () => {
    find("schema-part").hidden = find("format").value !== "json_schema";
  });
  for (const id of Object.keys(CHECKS)) {
    find(id).addEventListener("change", () => json(id));
    document.querySelector(`[data-example=${id}]`).addEventListener("click", () => {
      find(id).value = JSON.stringify(EXAMPLES[id], null, 2);
      json(id);
      find(id).focus();
      find(id).setSelectionRange(0, 0);
      find(id).scrollTop = 0;
    });
  }
}
