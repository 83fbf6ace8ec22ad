// Runs the example's own code against a server: its arguments are the example's folder, the server, a code, a voice and a text.
// Prints one JSON object of what came of each step.

const [folder, base, code, voice, text] = process.argv.slice(2);
const { Glottis, Refused, newKey } = await import(`${folder}/glottis.js`);

const told = {};

async function step(name, act) {
  try {
    told[name] = await act();
  } catch (error) {
    told[name] = { refused: error instanceof Refused ? error.code : error.name };
  }
}

const key = await newKey();
const glottis = new Glottis(base, key);
await step("export", async () => crypto.subtle.exportKey("pkcs8", key.privateKey));
await step("control", async () => {
  const open = await crypto.subtle.generateKey({ name: "ECDSA", namedCurve: "P-256" }, true, ["sign"]);
  return (await crypto.subtle.exportKey("pkcs8", open.privateKey)).byteLength;
});
await step("before", () => glottis.voice(voice));
await step("register", () => glottis.register(code));
await step("again", () => glottis.register(code));
await step("read", () => glottis.voice(voice));
await step("other", () => glottis.voice("00000000-0000-4000-8000-000000000000"));
await step("spoken", async () => (await glottis.speak(voice, text)).byteLength);
await step("foreign", async () => (await glottis.speak("00000000-0000-4000-8000-000000000000", text)).byteLength);
await step("thief", async () => new Glottis(base, await newKey()).speak(voice, text));
console.log(JSON.stringify(told));
