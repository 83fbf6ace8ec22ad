import { Glottis, enrol, newKey } from "./glottis.js";
import { keepKey, keptKey } from "./keys.js";

const field = (id) => document.getElementById(id);
const say = (text) => (field("said").textContent = text);

async function glottis() {
  const key = (await keptKey()) ?? (await newKey());
  await keepKey(key);
  return new Glottis(field("server").value, key);
}

function on(form, act) {
  field(form).addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      say(await act());
    } catch (error) {
      say(error.fix ? `${error.message} ${error.fix}` : String(error));
    }
  });
}

on("enrolment", async () => {
  const voice = await enrol(field("server").value, field("ticket").value, field("name").value, field("audio").files);
  field("voice").value = voice.id;
  return `Enrolled as ${voice.id}.`;
});

on("registration", async () => {
  const known = await (await glottis()).register(field("code").value);
  field("voice").value = known.voice ?? "";
  return `This browser is ${known.client_id}.`;
});

on("speech", async () => {
  const sound = await (await glottis()).speak(field("voice").value, field("text").value);
  field("player").src = URL.createObjectURL(new Blob([sound], { type: "audio/wav" }));
  return "Spoken.";
});
