// The page in the address bar: `#/` is the overview, `#/run/ID` a run.
import { el, put } from "./dom.js";
import { OverviewPage } from "./overview.js";
import { RunPage } from "./run.js";

const main = document.getElementById("main"), link = document.getElementById("link");
const where = document.getElementById("where"), said = document.getElementById("said");
let page = null, opened = 0;

function onLink(state) {
  link.textContent = state;
  link.className = `pill ${state === "live" ? "good" : "amber"}`;
}

async function show() {
  const turn = ++opened;
  page?.close();
  const [, run] = /^#\/run\/(.+)$/.exec(location.hash) ?? [];
  const run_id = run && decodeURIComponent(run);
  document.title = run_id ? `${run_id} – Motley` : "Motley";
  put(where, run_id ? [el("a", { href: "#/" }, "Cluster"), " / ", el("b", {}, run_id)] : "");
  put(main, el("p", { className: "quiet" }, "Asking the hosts …"));
  const fresh = (page = run_id ? new RunPage(run_id, main, onLink, (text) => { said.textContent = text; }) : new OverviewPage(main, onLink));
  try {
    await fresh.open();
    if (turn !== opened) fresh.close();
  } catch (error) {
    if (turn !== opened) return;
    onLink("reconnecting");
    put(main, el("p", { className: "remark" }, `${error.message}; trying again`));
    setTimeout(() => turn === opened && show(), 3000);
  }
}

addEventListener("hashchange", () => location.hash.startsWith("#/") && show());
show();
