// The page in the address bar: `#/` is the overview, `#/run/ID` a run, `#/runs/ID/ID` two of them.
import { ComparePage } from "./compare.js";
import { home } from "./data.js";
import { el, put } from "./dom.js";
import { OverviewPage } from "./overview.js";
import { RunPage } from "./run.js";

const ADDRESS = /^#\/runs?\/([^/]+)(?:\/([^/]+))?$/;
const main = document.getElementById("main"), link = document.getElementById("link");
const where = document.getElementById("where"), said = document.getElementById("said");
let page = null, opened = 0;

function onLink(state) {
  link.textContent = state;
  link.className = `pill ${{ live: "good", reconnecting: "amber" }[state] ?? ""}`;
}

async function show() {
  const turn = ++opened;
  page?.close();
  const ids = (ADDRESS.exec(location.hash) ?? ADDRESS.exec(home) ?? []).slice(1).filter(Boolean).map(decodeURIComponent);
  document.title = [...ids, "Motley"].join(" – ");
  put(where, ids.length ? [home === "#/" ? [el("a", { href: home }, "Cluster"), " / "] : null, el("b", {}, ids.join(" and "))] : "");
  const place = el("div", {}, el("p", { className: "quiet" }, "Asking the hosts …")); // what a page that was left still draws is not seen
  main.replaceChildren(place);
  const fresh = (page = ids.length > 1 ? new ComparePage(ids, place, onLink)
    : ids.length ? new RunPage(ids[0], place, onLink, (text) => { said.textContent = text; }) : new OverviewPage(place, onLink));
  try {
    await fresh.open();
    if (turn !== opened) fresh.close();
  } catch (error) {
    if (turn !== opened) return;
    onLink("reconnecting");
    put(place, el("p", { className: "remark" }, `${error.message}; trying again`));
    setTimeout(() => turn === opened && show(), 3000);
  }
}

addEventListener("hashchange", () => location.hash.startsWith("#/") && show());
show();
