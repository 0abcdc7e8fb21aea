// Vercel's AI SDK, in Node: objects of a schema, tools, and streams of both.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "manta", baseURL: process.env.DEMO_URL + "/v1", apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const small = z.number().int().min(0).max(99);
const schema = z.object({ a: small, b: small }).strict();
const ask = { model: provider("demo"), prompt: "What is 23 + 58?", temperature: 0, maxRetries: 0 };

assert.match((await generateText(ask)).text, /81/);

const { object, usage, finishReason } = await generateObject({ ...ask, schema });
schema.parse(object);
assert.equal(finishReason, "stop");
assert.ok(usage.outputTokens > 0 && usage.inputTokens > 0);

const parts = streamObject({ ...ask, schema });
let last = {};
for await (const part of parts.partialObjectStream) last = part;
assert.deepEqual(last, await parts.object);
assert.deepEqual(last, object);

const choice = await generateObject({ ...ask, output: "enum", enum: ["yes", "no"] });
assert.ok(["yes", "no"].includes(choice.object));

const asked = [];
const tools = {
  add: tool({ description: "Adds.", inputSchema: schema, execute: async (input) => (asked.push(input), input.a + input.b) }),
};
const one = { ...ask, tools, providerOptions: { manta: { parallel_tool_calls: false } } };
const called = await generateText({ ...one, toolChoice: "required" });
assert.equal(called.finishReason, "tool-calls");
assert.deepEqual(called.toolCalls.map((call) => [call.toolName, call.input]), [["add", asked[0]]]);
assert.equal(called.toolResults[0].output, asked[0].a + asked[0].b);

const named = await generateText({ ...one, toolChoice: { type: "tool", toolName: "add" } });
assert.deepEqual(named.toolCalls[0].input, called.toolCalls[0].input);

const stream = streamText({ ...one, toolChoice: "required" });
const kinds = [];
for await (const part of stream.fullStream) kinds.push(part.type);
assert.ok(kinds.includes("tool-input-delta") && kinds.includes("tool-call") && kinds.includes("tool-result"), kinds);
assert.deepEqual((await stream.toolCalls)[0].input, called.toolCalls[0].input);

await assert.rejects(generateText({ ...ask, temperature: -1 }), (error) => error.statusCode === 400);
