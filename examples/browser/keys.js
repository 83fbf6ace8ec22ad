// Where a page keeps its key between visits: IndexedDB stores the CryptoKey itself, which stays as unreadable as it was made.

const NAME = "glottis";

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore("keys");
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export async function keptKey() {
  return done((await opened()).transaction("keys").objectStore("keys").get(NAME));
}

export async function keepKey(key) {
  return done((await opened()).transaction("keys", "readwrite").objectStore("keys").put(key, NAME));
}
