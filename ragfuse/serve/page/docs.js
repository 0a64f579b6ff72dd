// The API page: renders the server's own OpenAPI document.

import { ask } from "./api.js";
import { byId, make, show, table } from "./dom.js";
import { forgetKey, key } from "./key.js";
import { startTheme } from "./theme.js";

let schemas = {};

function resolved(schema) {
  return schema && schema.$ref ? schemas[schema.$ref.split("/").pop()] || {} : schema || {};
}

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return [...new Set(choices.map(typeOf))].join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items) || "anything"}`;
  return schema.type || "anything";
}

function limits(schema) {
  const words = {
    minimum: (n) => `at least ${n}`, maximum: (n) => `at most ${n}`,
    exclusiveMinimum: (n) => `above ${n}`, exclusiveMaximum: (n) => `below ${n}`,
    minLength: (n) => `at least ${n} characters`, maxLength: (n) => `at most ${n} characters`,
    minItems: (n) => `at least ${n} items`, maxItems: (n) => `at most ${n} items`,
  };
  const all = [schema, ...(schema.anyOf || [])];
  const found = all.flatMap((each) => Object.entries(words).filter(([name]) => name in each).map(([name, word]) => word(each[name])));
  return found.length ? `(${found.join(", ").replace(/\b1 (character|item)s/g, "1 $1")})` : "";
}

function fields(name, schema) {
  const required = schema.required || [];
  const rows = Object.entries(schema.properties || {}).map(([field, found]) => [
    make("code", {}, field), typeOf(found), required.includes(field) ? "yes" : "",
    found.default === undefined || found.default === null ? "" : make("code", {}, JSON.stringify(found.default)),
    [found.description, limits(found)].filter(Boolean).join(" ")]);
  if (!rows.length) return null;
  return [make("h3", {}, name), table(`Fields of ${name}`, ["field", "type", "required", "default", "what it is"], rows)];
}

// Tables of the body's fields and of the fields of all objects inside the body.
function bodyOf(operation) {
  const content = operation.requestBody?.content?.["application/json"]?.schema;
  if (!content) return [];
  const found = [fields("Body", resolved(content))];
  const seen = new Set([typeOf(content)]);
  const waiting = [resolved(content)];
  while (waiting.length) {
    for (const name of JSON.stringify(waiting.pop()).matchAll(/"#\/components\/schemas\/([^"]+)"/g)) {
      if (seen.has(name[1])) continue;
      seen.add(name[1]);
      waiting.push(schemas[name[1]] || {});
      found.push(fields(name[1], schemas[name[1]] || {}));
    }
  }
  return found;
}

function route(path, method, operation) {
  const parameters = (operation.parameters || []).map((each) => [
    make("code", {}, each.name), each.in, typeOf(each.schema), each.required ? "yes" : "", limits(each.schema || {})]);
  const answers = Object.entries(operation.responses || {}).map(([status, each]) => [status, each.description]);
  return make("details", { class: "card route", "data-text": `${method} ${path} ${JSON.stringify(bodyNames(operation))}`.toLowerCase() },
    make("summary", {}, make("span", { class: "method" }, method.toUpperCase()), make("span", { class: "path" }, path),
      make("span", { class: "quiet" }, operation.description || operation.summary || "")),
    make("div", { class: "inside stack" },
      parameters.length ? table(`Parameters of ${path}`, ["parameter", "in", "type", "required", "limits"], parameters) : null,
      ...bodyOf(operation),
      make("h3", {}, "Responses"),
      table(`Responses of ${path}`, ["status", "meaning"], answers)));
}

function bodyNames(operation) {
  return Object.keys(resolved(operation.requestBody?.content?.["application/json"]?.schema).properties || {});
}

async function start() {
  startTheme();
  byId("base").textContent = `${location.origin}/v1`;
  byId("forget-key").hidden = !key();
  byId("forget-key").addEventListener("click", () => { forgetKey(); location.reload(); });
  try {
    const found = await ask("/openapi.json");
    schemas = found.components?.schemas || {};
    show(byId("routes"), Object.entries(found.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => route(path, method, operation))));
  } catch (error) {
    byId("failure").textContent = error.message;
  }
  byId("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const each of byId("routes").children) each.hidden = !each.dataset.text.includes(wanted);
  });
}

start();
