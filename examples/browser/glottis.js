// A browser as a client of Glottis: a P-256 key that never leaves it, a proof with every request (RFC 9449), and for every
// call a fresh token. No library is needed; where a page is served from is set at the server (GLOTTIS_BROWSER_ORIGINS).

const encoder = new TextEncoder();

export function base64url(bytes) {
  return btoa(String.fromCharCode(...new Uint8Array(bytes))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}

async function sha256(text) {
  return crypto.subtle.digest("SHA-256", encoder.encode(text));
}

// A key pair whose private half cannot be read out, not even by this page: `false` is what makes it so.
export async function newKey() {
  return crypto.subtle.generateKey({ name: "ECDSA", namedCurve: "P-256" }, false, ["sign"]);
}

// The proof that this key signs this request, for this token or code, now. ECDSA in WebCrypto is r||s, as ES256 wants it.
export async function proof(key, method, url, { token, nonce } = {}) {
  const { kty, crv, x, y } = await crypto.subtle.exportKey("jwk", key.publicKey);
  const header = { typ: "dpop+jwt", alg: "ES256", jwk: { kty, crv, x, y } };
  const claims = {
    htm: method,
    htu: url,
    iat: Math.floor(Date.now() / 1000),
    jti: base64url(crypto.getRandomValues(new Uint8Array(16))),
  };
  if (token !== undefined) claims.ath = base64url(await sha256(token));
  if (nonce !== undefined) claims.nonce = nonce;
  const signed = [header, claims].map((part) => base64url(encoder.encode(JSON.stringify(part)))).join(".");
  const signature = await crypto.subtle.sign({ name: "ECDSA", hash: "SHA-256" }, key.privateKey, encoder.encode(signed));
  return `${signed}.${base64url(signature)}`;
}

export class Refused extends Error {
  constructor(status, { code, message, fix }) {
    super(`${code}: ${message}`);
    Object.assign(this, { status, code, fix });
  }
}

export class Glottis {
  // `base`: the server's address, such as https://voice.example:8443. `key`: from newKey, or kept from an earlier visit.
  constructor(base, key) {
    this.base = base.replace(/\/$/, "");
    this.key = key;
    this.nonce = undefined;
  }

  // Once: from here on this key is the client that the code was made for.
  async register(code) {
    const body = JSON.stringify({ code });
    return (await this.send("POST", "/v1/browser-keys", { bound: code, headers: { "Content-Type": "application/json" }, body })).json();
  }

  async voice(id) {
    return (await this.call("read", {}, "GET", `/v1/voices/${id}`)).json();
  }

  // A WAV file, as an ArrayBuffer.
  async speak(id, text) {
    const hash = Array.from(new Uint8Array(await sha256(text)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    const body = JSON.stringify({ model: "hibari", input: text, voice: id });
    const request = { headers: { "Content-Type": "application/json" }, body };
    return (await this.call("speak", { voice: id, text_sha256: hash }, "POST", "/v1/audio/speech", request)).arrayBuffer();
  }

  // One act: a token for exactly this, and its one use. It lives five seconds.
  async call(action, details, method, path, request = {}) {
    const form = new URLSearchParams({
      grant_type: "client_credentials",
      authorization_details: JSON.stringify([{ type: "glottis_voice", actions: [action], ...details }]),
    });
    const answer = await this.send("POST", "/oauth/token", { body: form });
    const token = (await answer.json()).access_token;
    const headers = { ...request.headers, Authorization: `DPoP ${token}` };
    return this.send(method, path, { ...request, headers, bound: token });
  }

  // A second try with the server's nonce, where this clock is off: the first one used nothing up.
  async send(method, path, { bound, headers = {}, body } = {}) {
    for (const last of [false, true]) {
      const url = this.base + path;
      const signed = await proof(this.key, method, url, { token: bound, nonce: this.nonce });
      // No cookies and no certificate of the browser's: the key alone says who this is.
      const answer = await fetch(url, { method, headers: { ...headers, DPoP: signed }, body, credentials: "omit", cache: "no-store" });
      const nonce = answer.headers.get("DPoP-Nonce");
      this.nonce = nonce ?? this.nonce;
      if (answer.ok) return answer;
      if (last || nonce === null) throw new Refused(answer.status, (await answer.json()).error);
    }
  }
}

// With a backend's ticket: one enrolment, and no key at all. `recordings`: files of any common audio format.
export async function enrol(base, ticket, name, recordings) {
  const form = new FormData();
  form.append("name", name);
  for (const recording of recordings) form.append("audio", recording);
  const headers = { Authorization: `Ticket ${ticket}` };
  const answer = await fetch(`${base}/v1/enrolments`, { method: "POST", headers, body: form, credentials: "omit" });
  if (!answer.ok) throw new Refused(answer.status, (await answer.json()).error);
  return answer.json();
}
