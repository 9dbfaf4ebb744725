// Every endpoint, by OpenAI's client for Node: node drive.mjs BASE_URL RECORDING -> one JSON object, a field for each.
// A call that fails is the field {failed: its name and message}; the test says which.

import { createReadStream, readFileSync } from "node:fs";
import OpenAI from "openai";
import { Stream } from "openai/streaming";

const [baseURL, recording] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const model = (await client.models.list()).data[0].id;

const sound = { type: "input_audio", input_audio: { data: readFileSync(recording).toString("base64"), format: "wav" } };
const messages = [{ role: "user", content: [sound, { type: "text", text: "What is that?" }] }];
const asked = { model, messages, temperature: 0, seed: 7, max_tokens: 8 };
const spoken = (format) => ({ modalities: ["text", "audio"], audio: { voice: "vivian", format } });
const said = { model, voice: "vivian", input: "Hello there.", seed: 7, max_new_tokens: 12 };

const decoded = (pieces) => Buffer.concat(pieces.map((piece) => Buffer.from(piece, "base64"))).toString("base64");

async function collected(stream, take) {
  const events = [];
  for await (const event of stream) events.push(take(event));
  return events;
}

const encoded = async (response) => Buffer.from(await response.arrayBuffer()).toString("base64");

// For each name what the call gives for it
async function each(names, call) {
  const found = {};
  for (const name of names) found[name] = await call(name);
  return found;
}

async function refusalOf(call) {
  try {
    await call();
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param, code: error.code, id: error.requestID };
  }
  throw new Error("it was not refused");
}

async function streamedChat(format) {
  const stream = await client.chat.completions.create({
    ...asked, ...spoken(format), stream: true, stream_options: { include_usage: true },
  });
  const chunks = await collected(stream, (chunk) => chunk);
  const deltas = chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.delta));
  return {
    text: deltas.map((delta) => delta.content ?? "").join(""),
    transcript: deltas.map((delta) => delta.audio?.transcript ?? "").join(""),
    audio: decoded(deltas.map((delta) => delta.audio?.data ?? "")),
    audio_ids: [...new Set(deltas.map((delta) => delta.audio?.id).filter(Boolean))],
    expires_at: deltas.map((delta) => delta.audio?.expires_at).filter(Boolean),
    finish_reasons: chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.finish_reason).filter(Boolean)),
    usage: chunks.at(-1).usage,
  };
}

const calls = {
  models: async () => (await client.models.list()).data.map((entry) => entry.id),
  one_model: async () => (await client.models.retrieve(model)).id,

  chat: async () => {
    const { choices, usage } = await client.chat.completions.create({ ...asked, ...spoken("pcm16") });
    const [{ message, finish_reason }] = choices;
    return { text: message.content, audio: message.audio.data, transcript: message.audio.transcript, finish_reason, usage };
  },

  chat_streams: () => each(["pcm16", "mp3"], streamedChat),

  chat_helper: async () => {
    const stream = client.chat.completions.stream({ ...asked, modalities: ["text"] });
    return { text: await stream.finalContent() };
  },

  speech: () =>
    each(["wav", "pcm", "mp3", "opus", "aac", "flac"], async (response_format) =>
      encoded(await client.audio.speech.create({ ...said, response_format }))),

  speech_stream: async () => {
    const response = await client.audio.speech.create({ ...said, response_format: "pcm" });
    return Buffer.concat(await collected(response.body, (piece) => Buffer.from(piece))).toString("base64");
  },

  speech_events: async () => {
    const response = await client.audio.speech.create({ ...said, response_format: "pcm", stream_format: "sse" });
    const events = await collected(Stream.fromSSEResponse(response, new AbortController()), (event) => event);
    return {
      types: [...new Set(events.map((event) => event.type))],
      audio: decoded(events.map((event) => event.audio ?? "")),
      usage: events.at(-1).usage,
    };
  },

  voices: async () => {
    const form = new FormData();
    form.set("name", "Ada");
    form.set("consent", "Ada, 2026-11-30");
    form.set("audio_sample", new Blob([readFileSync(recording)], { type: "audio/wav" }), "ada.wav");
    const before = await client.get("/audio/voices");
    const uploaded = await client.post("/audio/voices", { body: form });
    const between = await client.get("/audio/voices");
    const again = await refusalOf(() => client.post("/audio/voices", { body: new FormData() }));
    const deleted = await client.delete("/audio/voices/Ada");
    const after = await client.get("/audio/voices");
    const gone = await refusalOf(() => client.delete("/audio/voices/Ada"));
    return { before, uploaded, between, again, deleted, after, gone };
  },

  transcription: async () =>
    (await client.audio.transcriptions.create({ model, file: createReadStream(recording) })).text,

  transcription_formats: () =>
    each(["json", "text", "verbose_json", "srt", "vtt"], (response_format) =>
      client.audio.transcriptions.create({ model, file: createReadStream(recording), response_format })),

  transcription_stream: async () => {
    const stream = await client.audio.transcriptions.create({ model, file: createReadStream(recording), stream: true });
    const events = await collected(stream, (event) => event);
    return { deltas: events.slice(0, -1).map((event) => event.delta).join(""), done: events.at(-1).text };
  },

  translation: () => refusalOf(() => client.audio.translations.create({ model, file: createReadStream(recording) })),

  refusal: () => refusalOf(() => client.chat.completions.create({ ...asked, temperature: -1 })),

  no_model: () => refusalOf(() => client.chat.completions.create({ ...asked, model: "no-such-model" })),
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
