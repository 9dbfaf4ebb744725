// Every endpoint, by OpenAI's client for Node: node drive.mjs BASE_URL RECORDING -> one JSON object, a field for each.
// A call that fails is the field {failed: its name and message}; the test says which.

import { createReadStream, readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, recording] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const model = (await client.models.list()).data[0].id;

const sound = { type: "input_audio", input_audio: { data: readFileSync(recording).toString("base64"), format: "wav" } };
const messages = [{ role: "user", content: [sound, { type: "text", text: "What is that?" }] }];
const asked = { model, messages, temperature: 0, seed: 7, max_tokens: 8 };
const spoken = { modalities: ["text", "audio"], audio: { voice: "vivian", format: "pcm16" } };
const said = { model, voice: "vivian", input: "Hello there.", seed: 7, max_new_tokens: 12 };

const decoded = (pieces) => Buffer.concat(pieces.map((piece) => Buffer.from(piece, "base64"))).toString("base64");

async function collected(stream, take) {
  const events = [];
  for await (const event of stream) events.push(take(event));
  return events;
}

const calls = {
  models: async () => (await client.models.list()).data.map((entry) => entry.id),
  one_model: async () => (await client.models.retrieve(model)).id,

  chat: async () => {
    const { choices, usage } = await client.chat.completions.create({ ...asked, ...spoken });
    const [{ message, finish_reason }] = choices;
    return { text: message.content, audio: message.audio.data, transcript: message.audio.transcript, finish_reason, usage };
  },

  chat_stream: async () => {
    const stream = await client.chat.completions.create({
      ...asked, ...spoken, stream: true, stream_options: { include_usage: true },
    });
    const chunks = await collected(stream, (chunk) => chunk);
    const deltas = chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.delta));
    return {
      text: deltas.map((delta) => delta.content ?? "").join(""),
      audio: decoded(deltas.map((delta) => delta.audio?.data ?? "")),
      finish_reasons: chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.finish_reason).filter(Boolean)),
      usage: chunks.at(-1).usage,
    };
  },

  chat_helper: async () => {
    const stream = client.chat.completions.stream({ ...asked, modalities: ["text"] });
    return { text: await stream.finalContent() };
  },

  speech: async () => Buffer.from(await (await client.audio.speech.create(said)).arrayBuffer()).toString("base64"),

  speech_stream: async () => {
    const response = await client.audio.speech.create({ ...said, response_format: "pcm" });
    return Buffer.concat(await collected(response.body, (piece) => Buffer.from(piece))).toString("base64");
  },

  transcription: async () =>
    (await client.audio.transcriptions.create({ model, file: createReadStream(recording) })).text,

  transcription_stream: async () => {
    const stream = await client.audio.transcriptions.create({ model, file: createReadStream(recording), stream: true });
    const events = await collected(stream, (event) => event);
    return { deltas: events.slice(0, -1).map((event) => event.delta).join(""), done: events.at(-1).text };
  },

  refusal: async () => {
    try {
      await client.chat.completions.create({ ...asked, temperature: -1 });
    } catch (error) {
      return { name: error.constructor.name, status: error.status, param: error.param, code: error.code, id: error.requestID };
    }
    throw new Error("it was not refused");
  },

  no_model: async () => {
    try {
      await client.chat.completions.create({ ...asked, model: "no-such-model" });
    } catch (error) {
      return { name: error.constructor.name, status: error.status };
    }
    throw new Error("it was found");
  },
};

const results = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    results[name] = await call();
  } catch (error) {
    results[name] = { failed: `${error.constructor.name}: ${error.message}` };
  }
}
console.log(JSON.stringify(results));
