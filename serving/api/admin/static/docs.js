// The server's OpenAPI document as a page: its routes, and the fields of their requests.

import { ApiError, get } from "./api.js";
import { find, make } from "./dom.js";

/** A reference's schema, or the schema itself. */
function resolved(schema, document) {
  if (!schema?.$ref) return schema ?? {};
  return document.components.schemas[schema.$ref.split("/").at(-1)] ?? {};
}

/** A field's type in a few words. */
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.anyOf) return [...new Set(schema.anyOf.map(typeOf))].join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function limits({ minimum, exclusiveMinimum, maximum, anyOf = [] }) {
  const low = minimum !== undefined ? `≥ ${minimum}` : "";
  const above = exclusiveMinimum !== undefined ? `> ${exclusiveMinimum}` : "";
  const high = maximum !== undefined ? `≤ ${maximum}` : "";
  return [low, above, high, ...anyOf.map(limits)].filter(Boolean).join(", ");
}

function fields({ properties = {}, required = [] }) {
  const rows = Object.entries(properties).map(([name, schema]) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, make("code", { text: name })),
      make("td", { text: typeOf(schema) }),
      make("td", { text: required.includes(name) ? "required" : limits(schema) }),
    ),
  );
  if (!rows.length) return [];
  const heads = ["Field", "Type", "Limits"].map((text) => make("th", { scope: "col", text }));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)));
  table.append(make("tbody", {}, ...rows));
  const region = { class: "wide", tabindex: "0", role: "region", "aria-label": "Fields" };
  return [make("div", region, table)];
}

function route(path, method, operation, document) {
  const content = Object.values(operation.requestBody?.content ?? {})[0];
  const body = resolved(content?.schema, document);
  const title = make("summary", {}, make("code", { text: `${method.toUpperCase()} ${path}` }));
  title.append(` ${operation.summary ?? ""}`);
  const parameters = (operation.parameters ?? []).map(({ name, schema, required }) => [
    name,
    { schema, required },
  ]);
  const given = {
    properties: Object.fromEntries(parameters.map(([name, { schema }]) => [name, schema ?? {}])),
    required: parameters.filter(([, { required }]) => required).map(([name]) => name),
  };
  const text = make("p", { class: "literal", text: operation.description ?? "" });
  return make("details", {}, title, text, ...fields(given), ...fields(body));
}

async function show() {
  try {
    const document = await get("openapi.json");
    find("version").textContent = document.info.version;
    for (const [path, methods] of Object.entries(document.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        find("routes").append(route(path, method, operation, document));
      }
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const key = "Type an API key into the playground’s settings, and come back in the same tab.";
    find("problem").textContent = error.status === 401 ? key : error.message;
    find("problem").hidden = false;
  }
}

show();
