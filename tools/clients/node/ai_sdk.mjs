// The Vercel AI SDK against the two servers of the tests, whose URLs it is given: `node ai_sdk.mjs REAL SCRIPTED`.
// Prints a line a test as JSON: {"name": ..., "error": null or text}. tests/test_client_ai_sdk.py reads them.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { embedMany, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from 'ai';
import assert from 'node:assert/strict';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;
const [real, scripted] = process.argv.slice(2);
const MODEL = 'tiny', apiKey = 'none', prompt = 'Weather in Paris?';
const City = z.object({ name: z.string().max(16), country: z.enum(['France', 'Portugal']), capital: z.boolean() });
const weather = tool({
  description: 'the weather of a city',
  inputSchema: z.object({ city: z.string().max(16) }),
  execute: async ({ city }) => `sunny in ${city}`,
});

const compatible = (base) =>
  createOpenAICompatible({ name: 'headrace', baseURL: `${base}/v1`, apiKey, includeUsage: true,
    supportsStructuredOutputs: true });
const openai = (base) => createOpenAI({ baseURL: `${base}/v1`, apiKey });
const providers = {
  compatible: (base) => compatible(base)(MODEL),
  'openai responses': (base) => openai(base)(MODEL),
  'openai chat': (base) => openai(base).chat(MODEL),
  anthropic: (base) => createAnthropic({ baseURL: `${base}/v1`, apiKey })(MODEL),
};

const tests = {};
for (const [name, model] of Object.entries(providers)) {
  const common = { maxRetries: 0 };
  tests[`${name}: generateText`] = async () => {
    const made = await generateText({ ...common, model: model(real), prompt, maxOutputTokens: 16 });
    assert.ok(made.text && made.usage.outputTokens <= 16);
  };
  tests[`${name}: streamText`] = async () => {
    const made = streamText({ ...common, model: model(real), prompt, maxOutputTokens: 16, onError: () => {} });
    let text = '';
    for await (const part of made.textStream) text += part;
    assert.ok(text && (await made.usage).outputTokens <= 16);
  };
  tests[`${name}: generateObject`] = async () => {
    const made = await generateObject({ ...common, model: model(real), schema: City, prompt, maxOutputTokens: 400 });
    City.parse(made.object);
  };
  tests[`${name}: streamObject`] = async () => {
    const made = streamObject({ ...common, model: model(real), schema: City, prompt, maxOutputTokens: 400,
      onError: () => {} });
    for await (const _ of made.partialObjectStream) ;
    City.parse(await made.object);
  };
  tests[`${name}: Output.object`] = async () => {
    const made = await generateText({ ...common, model: model(real), output: Output.object({ schema: City }), prompt,
      maxOutputTokens: 400 });
    City.parse(made.output);
  };
  tests[`${name}: forced tool`] = async () => {
    const made = await generateText({ ...common, model: model(real), prompt, tools: { weather }, toolChoice: 'required',
      maxOutputTokens: 200 });
    assert.equal(typeof made.toolCalls[0].input.city, 'string');
  };
  tests[`${name}: tool loop`] = async () => {
    const made = await generateText({ ...common, model: model(scripted), prompt, tools: { weather },
      stopWhen: stepCountIs(4) });
    assert.equal(made.text, 'The tool said: sunny in Paris');
    assert.equal(made.steps.length, 2);
  };
  tests[`${name}: streamed tool loop`] = async () => {
    const made = streamText({ ...common, model: model(scripted), prompt, tools: { weather }, stopWhen: stepCountIs(4),
      onError: () => {} });
    const kinds = [];
    for await (const part of made.fullStream) kinds.push(part.type);
    assert.ok(kinds.includes('tool-input-delta') && kinds.includes('tool-result'));
    assert.equal(await made.text, 'The tool said: sunny in Paris');
  };
}
tests['compatible: embedMany'] = async () => {
  const made = await embedMany({ model: compatible(real).textEmbeddingModel(MODEL), values: ['one', 'two'],
    maxRetries: 0 });
  assert.equal(made.embeddings.length, 2);
};

for (const [name, test] of Object.entries(tests)) {
  let error = null;
  try {
    await test();
  } catch (caught) {
    error = `${caught}\n${caught.responseBody ?? caught.cause?.responseBody ?? caught.text ?? ''}`.slice(0, 2000);
  }
  console.log(JSON.stringify({ name, error }));
}
