// Requests to the job: scale, drain, undrain. All of them need the token.

import { retry } from "./feed.js";
import { element, say } from "./text.js";

const KEY = "farandole-token";

/** Returns the token that this tab knows: of the address (#token=...), which then loses it, or of the form. */
export function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

export class Control {
  constructor() {
    const on = (id, act) => document.getElementById(id).addEventListener("submit", (event) => {
      event.preventDefault();
      act(event.submitter);
    });
    on("token-form", () => {
      sessionStorage.setItem(KEY, document.getElementById("token").value.trim());
      document.getElementById("token").value = "";
      this.answer("The token is used from now on.");
      this.allow();
      retry();
    });
    on("scale-form", () => this.#ask("scale", { size: Number(document.getElementById("size").value) }));
    on("drain-form", (button) => this.#ask(button?.name || "drain", { host: document.getElementById("host").value }));
    this.allow();
  }

  /** Enables what needs a token if there is one. */
  allow() {
    const isAllowed = Boolean(token());
    for (const each of document.querySelectorAll("#scale-form :is(input, button), #drain-form :is(select, button)")) each.disabled = !isAllowed;
    document.getElementById("token-form").hidden = isAllowed;
  }

  /** Shows the hosts, and the number of workers as it is until the user has begun to change it. */
  show(status, hosts) {
    const names = hosts.map((each) => each.name);
    if (names.join() !== this.names) {
      this.names = names.join();
      document.getElementById("host").replaceChildren(...names.map((name) => element("option", {}, name)));
    }
    const size = document.getElementById("size");
    if (status && document.activeElement !== size && !size.value) size.value = status.wanted;
  }

  answer(text, isRefused = false) {
    const place = document.getElementById("answer");
    place.classList.toggle("refused", isRefused);
    say(place, text);
  }

  /** Saves what the server has at `path` as a file. A link could not send the token. */
  async save(path, name) {
    try {
      const response = await fetch(path, { headers: token() ? { Authorization: `Bearer ${token()}` } : {} });
      if (!response.ok) throw new Error((await response.json()).error);
      const link = element("a", { href: URL.createObjectURL(await response.blob()), download: name });
      link.click();
      URL.revokeObjectURL(link.href);
    } catch (error) {
      this.answer(error.message, true);
    }
  }

  async #ask(action, body) {
    try {
      const response = await fetch(`/${action}`, {
        method: "POST", body: JSON.stringify(body),
        headers: { Authorization: `Bearer ${token()}`, "Content-Type": "application/json" },
      });
      const { accepted, error } = await response.json();
      if (response.status === 401) {
        sessionStorage.removeItem(KEY);
        this.allow();
      }
      this.answer(accepted ?? error, !response.ok);
    } catch (error) {
      this.answer("the page's server does not answer", true);
    }
  }
}
