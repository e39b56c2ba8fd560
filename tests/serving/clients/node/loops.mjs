// Agent loops by clients for JavaScript, against a model with a script.
//
// The argument is JSON: `url`, `key`, `question` and `functions`. The output is JSON: an answer or an
// error for each client.

import Anthropic from "@anthropic-ai/sdk";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";

const { url, key, question, functions } = JSON.parse(process.argv[2]);
const MODEL = "scripted";
const MAX_TURNS = 5;

const compute = {
  multiply: ({ a, b }) => String(a * b),
  add: ({ a, b }) => String(a + b),
};

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });

async function openaiChat(stream) {
  const messages = [{ role: "user", content: question }];
  const tools = functions.map((each) => ({ type: "function", function: each }));
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const ask = { model: MODEL, messages, tools, reasoning_effort: "low" };
    const completion = stream
      ? await openai.chat.completions.stream(ask).finalChatCompletion()
      : await openai.chat.completions.create(ask);
    const { message } = completion.choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const { id, function: called } of message.tool_calls) {
      const content = compute[called.name](JSON.parse(called.arguments));
      messages.push({ role: "tool", tool_call_id: id, content });
    }
  }
}

async function openaiRunner(stream) {
  const tools = functions.map((each) => ({
    type: "function",
    function: { ...each, function: compute[each.name], parse: JSON.parse },
  }));
  const messages = [{ role: "user", content: question }];
  return openai.chat.completions.runTools({ model: MODEL, messages, tools, stream }).finalContent();
}

async function openaiResponses(stream) {
  const input = [{ role: "user", content: question }];
  const tools = functions.map((each) => ({ type: "function", ...each, strict: false }));
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const ask = { model: MODEL, input, tools };
    const response = stream
      ? await openai.responses.stream(ask).finalResponse()
      : await openai.responses.create(ask);
    input.push(...response.output);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return response.output_text;
    for (const { call_id, name, arguments: given } of calls) {
      const output = compute[name](JSON.parse(given));
      input.push({ type: "function_call_output", call_id, output });
    }
  }
}

async function anthropicMessages(stream) {
  const messages = [{ role: "user", content: question }];
  const tools = functions.map(({ name, description, parameters }) => ({
    name,
    description,
    input_schema: parameters,
  }));
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const ask = { model: MODEL, max_tokens: 500, messages, tools };
    const message = stream
      ? await anthropic.messages.stream(ask).finalMessage()
      : await anthropic.messages.create(ask);
    messages.push({ role: "assistant", content: message.content });
    if (message.stop_reason === "end_turn") return message.content.at(-1).text;
    const content = message.content
      .filter((block) => block.type === "tool_use")
      .map(({ id, name, input }) => ({
        type: "tool_result",
        tool_use_id: id,
        content: compute[name](input),
      }));
    messages.push({ role: "user", content });
  }
}

async function ai(model, stream) {
  const tools = Object.fromEntries(
    functions.map(({ name, description, parameters }) => [
      name,
      tool({ description, inputSchema: jsonSchema(parameters), execute: compute[name] }),
    ]),
  );
  const ask = { model, prompt: question, tools, stopWhen: stepCountIs(MAX_TURNS), maxRetries: 0 };
  const errors = [];
  const result = stream
    ? streamText({ ...ask, onError: ({ error }) => errors.push(error) })
    : await generateText(ask);
  if (stream) await result.consumeStream();
  if (errors.length) throw errors[0];
  return [await result.reasoningText, await result.text].filter(Boolean).join(" ");
}

const compatible = createOpenAICompatible({ name: "weft", baseURL: `${url}/v1`, apiKey: key });
const vercel = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });

const CLIENTS = {
  "openai chat": openaiChat,
  "openai runTools": openaiRunner,
  "openai responses": openaiResponses,
  "anthropic messages": anthropicMessages,
  "ai openai-compatible": (stream) => ai(compatible(MODEL), stream),
  "ai openai chat": (stream) => ai(vercel.chat(MODEL), stream),
  "ai openai responses": (stream) => ai(vercel.responses(MODEL), stream),
};

const answers = {};
for (const [name, client] of Object.entries(CLIENTS)) {
  for (const stream of [false, true]) {
    const full = stream ? `${name}, streamed` : name;
    try {
      answers[full] = await client(stream);
    } catch (error) {
      answers[full] = `${error.name}: ${error.responseBody ?? error.message}`;
    }
  }
}
console.log(JSON.stringify(answers));
