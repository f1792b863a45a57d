"use strict";
// Draws what is in the JSON object of the page: one run in full, or several side by side. Text from the data
// only ever becomes text nodes. With data.live it asks the server of `evenstep watch` for news every second.
(() => {
  const page = document.getElementById("page");
  const charts = new Map(); // title -> {plot, layout}
  const open = new Set(); // names of the opened <details>
  let data = JSON.parse(document.getElementById("data").textContent);
  let axis = "step";
  let connection = null;

  // ---- small things

  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => child.nodeType ? child : String(child)));
    return element;
  }
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const known = (value) => value !== null && value !== undefined;
  const last = (list) => (list && list.length ? list[list.length - 1] : null);

  function number(value) {
    if (!known(value)) return "–";
    if (typeof value !== "number") return text(value);
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return size && size < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }
  function text(value) {
    if (!known(value)) return "–";
    return typeof value === "object" ? JSON.stringify(value) : String(value);
  }
  const percent = (value) => (known(value) ? `${(100 * value).toFixed(2)} %` : "–");
  function duration(seconds) {
    if (!known(seconds)) return "–";
    if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
    const whole = Math.round(seconds), two = (value) => String(value).padStart(2, "0");
    const rest = `${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
    return whole < 3600 ? rest : `${Math.floor(whole / 3600)}:${rest}`;
  }
  function date(seconds) { // local time, as 2026-12-01 03:33
    if (!seconds) return "–";
    return new Date(seconds * 1000).toLocaleString("sv-SE", {dateStyle: "short", timeStyle: "medium"});
  }
  const bytes = (value) => (value < 1e6 ? `${(value / 1e3).toFixed(0)} kB` : `${(value / 1e6).toFixed(1)} MB`);
  const table = (head, rows) => h("div", {class: "scroll"}, h("table", {}, head ? h("tr", {}, head.map((cell) => h("th", {}, cell))) : null, rows));
  const flat = (object) => Object.fromEntries(Object.entries(object).flatMap(([key, value]) => (known(value) && typeof value === "object" ? Object.entries(value).map(([name, inner]) => [`${key}.${name}`, inner]) : [[key, value]])));
  const pairs = (object) => table(null, Object.entries(object).map(([key, value]) => h("tr", {}, h("th", {}, key), h("td", {class: /sha256|dir/.test(key) ? "mono" : null}, typeof value === "number" ? number(value) : text(value)))));
  function card(title, ...children) {
    return h("section", {class: "card"}, h("h2", {}, title), ...children);
  }
  function details(name, ...children) {
    return h("details", {open: open.has(name), ontoggle: (event) => open[event.target.open ? "add" : "delete"](name)}, h("summary", {}, name), ...children);
  }

  // ---- what a run came to

  const USUAL = {train: new Set(["step", "epoch", "t", "loss", "lr", "images_per_s", "grad_norm"]), eval: new Set(["step", "epoch", "t", "loss", "accuracy", "samples"])};

  // Metrics of the user's own in the last evaluation, while there is no result yet.
  const measuredSoFar = (evals) => Object.fromEntries(Object.entries(evals).filter(([name]) => !USUAL.eval.has(name)).map(([name, values]) => [name, last(values)]));
  function outcome(run) {
    const evals = run.eval, train = run.train, result = run.result || {};
    return {
      test_accuracy: known(result.test_accuracy) ? result.test_accuracy : last(evals.accuracy),
      test_loss: known(result.test_loss) ? result.test_loss : last(evals.loss),
      train_loss: known(result.train_loss) ? result.train_loss : last(train.loss),
      images_per_s: known(result.images_per_s) ? result.images_per_s : last(train.images_per_s),
      step: run.step,
      test_metrics: known(result.test_metrics) ? result.test_metrics : measuredSoFar(evals),
      restarts: run.starts.filter((start, i) => i && !start.resumed).length,
      running_s: Math.max(last(train.t) || 0, last(evals.t) || 0) || null,
      world_size: known(result.world_size) ? result.world_size : (last(run.starts) || {}).world_size,
      lanes: known(result.lanes) ? result.lanes : (last(run.starts) || {}).lanes,
      weights_sha256: result.weights_sha256,
    };
  }
  function status(run) {
    if (run.finished) return h("span", {class: "chip good"}, "finished");
    const age = run.updated ? Date.now() / 1000 - run.updated : null;
    if (data.live && age !== null && age < 60) return h("span", {class: "chip busy"}, "running");
    return h("span", {class: "chip busy", title: "There is no result yet: the run goes on, or was stopped."}, "not finished");
  }
  const colorOf = (i) => `--c${i % 8}`;

  function header() {
    const several = data.runs.length > 1, run = data.runs[0];
    const live = data.live ? h("span", {class: `chip ${connection === false ? "bad" : "good"}`, id: "connection"}, connection === false ? "connection lost" : "live") : null;
    if (several) return h("header", {}, h("div", {class: "head"}, h("h1", {}, `${data.runs.length} runs side by side`), live));
    const facts = run.facts, start = last(run.starts) || {};
    const parts = [facts.data, known(facts.num_parameters) ? `${number(facts.num_parameters)} parameters` : null,
      known(start.world_size) ? `${start.world_size} process${start.world_size === 1 ? "" : "es"}, ${start.lanes} lane${start.lanes === 1 ? "" : "s"}, ${start.mode} mode, ${start.device}` : null,
      run.updated ? `last line ${date(run.updated)}` : null];
    return h("header", {}, h("div", {class: "head"}, h("h1", {}, run.name), status(run), live), h("div", {class: "soft small"}, parts.filter(known).join(" · ")));
  }
  function tiles() {
    if (data.runs.length > 1) return h("div");
    const run = data.runs[0], values = outcome(run), total = run.facts.total_steps;
    const shown = [["test accuracy", percent(values.test_accuracy)], ["test loss", number(values.test_loss)], ["train loss", number(values.train_loss)],
      ...Object.entries(values.test_metrics).filter(([name]) => name !== "accuracy").map(([name, value]) => [`test ${name}`, number(value)]),
      ["step", number(values.step) + (known(total) && total > values.step ? ` of ${number(total)}` : "")], ["images/s", number(values.images_per_s)],
      ["restarts", number(values.restarts)], ["running time", duration(values.running_s)]];
    return h("div", {class: "tiles"}, shown.map(([name, value]) => h("div", {class: "tile"}, h("b", {}, value), h("span", {class: "soft small"}, name))));
  }

  // ---- comparison

  function comparison() {
    if (data.runs.length < 2) return h("div");
    const all = data.runs.map(outcome), own = [...new Set(all.flatMap((v) => Object.keys(v.test_metrics)))].filter((name) => name !== "accuracy"), best = Math.max(...all.map((v) => (known(v.test_accuracy) ? v.test_accuracy : -1)));
    const rows = data.runs.map((run, i) => {
      const v = all[i];
      return h("tr", {}, h("td", {class: "run"}, h("i", {style: `background:var(${colorOf(i)})`}), run.name), h("td", {}, status(run)),
        h("td", {class: v.test_accuracy === best ? "best" : null}, percent(v.test_accuracy)),
        [number(v.test_loss), ...own.map((name) => number(v.test_metrics[name])), number(v.train_loss), number(v.step), number(v.images_per_s), duration(v.running_s), number(v.restarts), text(v.world_size), text(v.lanes)].map((cell) => h("td", {}, cell)),
        h("td", {class: "mono", title: v.weights_sha256}, v.weights_sha256 ? v.weights_sha256.slice(0, 12) : "–"));
    });
    return card("Results", table(["run", "", "test accuracy", "test loss", ...own.map((name) => `test ${name}`), "train loss", "step", "images/s", "running time", "restarts", "processes", "lanes", "weights"], rows));
  }
  function differences() {
    if (data.runs.length < 2) return h("div");
    const maps = data.runs.map((run) => new Map([...run.config.map(([key, value]) => [key, value]), ...Object.entries(run.numerics || {}).map(([key, value]) => [`numerics: ${key}`, value])]));
    const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))].filter((key) => new Set(maps.map((map) => JSON.stringify(known(map.get(key)) ? map.get(key) : null))).size > 1);
    const body = keys.length ? table(["", ...data.runs.map((run) => run.name)], keys.map((key) => h("tr", {}, h("th", {}, key), maps.map((map) => h("td", {}, text(map.get(key))))))) : h("p", {class: "soft"}, "The options of these runs are the same.");
    return card("Options that differ", body);
  }

  // ---- curves

  const PLOTS = [
    {title: "Loss", of: [["train", "loss"], ["eval", "loss"]]},
    {title: "Test accuracy", of: [["eval", "accuracy"]], values: percent},
    {title: "Learning rate", of: [["train", "lr"]]},
    {title: "Images per second", of: [["train", "images_per_s"]]},
    {title: "Norm of the gradient", of: [["train", "grad_norm"]]},
  ];
  function plots() {
    const others = new Set(data.runs.flatMap((run) => ["train", "eval"].flatMap((kind) => Object.keys(run[kind]).filter((key) => !USUAL[kind].has(key)).map((key) => JSON.stringify([kind, key])))));
    return [...PLOTS, ...[...others].map((name) => ({title: `${JSON.parse(name)[1]} (${JSON.parse(name)[0] === "eval" ? "test" : "train"})`, of: [JSON.parse(name)]}))];
  }
  function curvesOf(plot) {
    const found = [];
    data.runs.forEach((run, i) => plot.of.forEach(([kind, key], j) => {
      const ys = run[kind][key];
      if (!ys || !ys.some(known)) return;
      const several = data.runs.length > 1, name = kind === "eval" ? "test" : "train";
      const label = several ? run.name + (plot.of.length > 1 ? ` ${name}` : "") : plot.of.length > 1 ? name : key;
      found.push({label, xs: run[kind][axis === "step" ? "step" : "t"], ys, stroke: several ? colorOf(i) : colorOf(j), faint: several && j === 0 && plot.of.length > 1, points: kind === "eval"});
    }));
    return found;
  }
  function marks(plot) {
    const context = plot.ctx, {left, top, width, height} = plot.bbox, ratio = devicePixelRatio;
    context.save();
    data.runs.forEach((run, i) => run.starts.slice(1).forEach((start) => {
      const x = plot.valToPos(axis === "step" ? start.step : start.t, "x", true);
      if (!(x >= left && x <= left + width)) return;
      context.strokeStyle = context.fillStyle = color(data.runs.length > 1 ? colorOf(i) : start.resumed ? "--soft" : "--bad");
      context.lineWidth = 1.5 * ratio;
      context.setLineDash([5 * ratio, 4 * ratio]);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
      context.font = `${11 * ratio}px system-ui, sans-serif`;
      const label = start.resumed ? "resumed" : `restart ${start.restart}`, right = x + 70 * ratio > left + width;
      context.textAlign = right ? "right" : "left";
      context.fillText(label, x + (right ? -4 : 4) * ratio, top + 12 * ratio);
    }));
    context.restore();
  }
  function chart(plot, curves, width) {
    const ink = color("--soft"), grid = {stroke: color("--grid"), width: 1}, font = "12px system-ui, sans-serif";
    const values = plot.values || number;
    const series = curves.map((curve) => ({
      label: curve.label, stroke: color(curve.stroke), width: curve.faint ? 1 : 2, dash: curve.faint ? [4, 3] : undefined,
      points: {show: curve.points || curve.ys.length < 3, size: 6, fill: color(curve.stroke)}, value: (_, value) => values(value),
    }));
    return {
      width, height: 230, padding: [10, 14, 0, 0],
      scales: {x: {time: false}},
      axes: [
        {stroke: ink, grid, ticks: grid, font, space: 55, values: (_, splits) => splits.map((value) => (axis === "step" ? number(value) : duration(value)))},
        {stroke: ink, grid, ticks: grid, font, size: 66, values: (_, splits) => splits.map((value) => (plot.values ? `${Number((100 * value).toFixed(3))} %` : number(value)))},
      ],
      series: [{label: axis === "step" ? "step" : "time", value: (_, value) => (axis === "step" ? number(value) : duration(value))}, ...series],
      cursor: {sync: {key: "evenstep", scales: ["x", null]}, drag: {x: true, y: false}},
      hooks: {draw: [marks]},
    };
  }
  function drawCharts(anew) {
    const box = document.getElementById("charts");
    for (const plot of plots()) {
      const curves = curvesOf(plot);
      let entry = charts.get(plot.title);
      if (!curves.length) continue;
      const layout = JSON.stringify([axis, curves.map((curve) => [curve.label, curve.ys.length < 3])]);
      const table = uPlot.join(curves.map((curve) => [curve.xs, curve.ys]));
      if (entry && !anew && entry.layout === layout) {
        entry.plot.setData(table);
        continue;
      }
      if (!entry) {
        const target = h("div");
        box.append(card(plot.title, data.runs.length > 1 && plot.of.length > 1 ? h("div", {class: "soft small"}, "dashed: train") : null, target));
        entry = {target};
        charts.set(plot.title, entry);
        new ResizeObserver(() => entry.plot && entry.target.clientWidth !== entry.plot.width && entry.plot.setSize({width: entry.target.clientWidth, height: 230})).observe(target);
      }
      if (entry.plot) entry.plot.destroy();
      entry.layout = layout;
      entry.plot = new uPlot(chart(plot, curves, entry.target.clientWidth), table, entry.target);
    }
    if (!charts.size && !box.childElementCount) box.append(card("Curves", h("p", {class: "soft", id: "no-curves"}, "There is no step in metrics.jsonl yet.")));
    else if (charts.size) document.getElementById("no-curves")?.closest("section").remove();
  }
  function controls() {
    const choice = (value, label) => h("label", {}, h("input", {type: "radio", name: "axis", value, checked: axis === value, onchange: () => { axis = value; drawCharts(true); }}), ` ${label}`);
    return h("div", {class: "bar small"}, h("span", {class: "soft"}, "Curves over"), choice("step", "steps"), choice("t", "running time"), h("span", {class: "soft"}, "drag to zoom, double-click to zoom out"));
  }

  // ---- the rest of one run

  function timeline() {
    if (data.runs.length > 1) return h("div");
    const run = data.runs[0], starts = run.starts;
    if (starts.length < 2) return h("div");
    const rows = starts.map((start, i) => h("tr", {}, h("td", {}, i === 0 ? "start" : start.resumed ? "resumed" : `restart ${start.restart}`), h("td", {}, number(start.step)), h("td", {}, duration(start.t)), h("td", {}, text(start.world_size)), h("td", {}, date(start.time))));
    return card("Starts and restarts", table(["", "from step", "running time", "processes", "at"], rows));
  }
  function times() {
    const run = data.runs[0], spent = run.times;
    if (data.runs.length > 1 || !spent || !spent.data_s) return h("div");
    const waiting = spent.wait_s || [], known_wait = waiting.every(known) && waiting.length;
    const names = [["data", "waiting for data"], ["compute", known_wait ? "computing" : "computing and waiting for other ranks"], ...(known_wait ? [["wait", "waiting for other ranks"]] : []), ["rest", "evaluation, checkpoints, reports"]];
    const rows = spent.data_s.map((data_s, rank) => {
      const wait = known_wait ? waiting[rank] : 0, step = spent.step_s[rank], total = Math.max(spent.wall_s, data_s + step) || 1;
      const parts = {data: data_s, compute: step - wait, wait, rest: total - data_s - step};
      const said = names.map(([key, name]) => `${name} ${duration(parts[key])} (${(100 * parts[key] / total).toFixed(1)} %)`).join(", ");
      return [h("span", {}, `rank ${rank}`), h("div", {class: "stack", role: "img", "aria-label": said, title: said}, names.map(([key]) => h("i", {style: `width:${100 * parts[key] / total}%;background:var(--${key})`}))),
        h("span"), h("span", {class: "soft"}, said)];
    });
    const note = known_wait ? "Waiting is what torch DDP sampled (steps 1 to 10 and each 100th after them), times the number of steps." : "How much of a step is waiting for other ranks is not known for this run.";
    return card(`Time of each rank, ${number(spent.steps)} steps since the last start`, h("div", {class: "ranks"}, rows.slice(0, 32).flat()), rows.length > 32 ? h("p", {class: "soft small"}, `The first 32 of ${rows.length} ranks.`) : null,
      h("div", {class: "key"}, names.map(([key, name]) => h("span", {}, h("i", {style: `background:var(--${key})`}), name))), h("div", {class: "soft small"}, note));
  }
  function confusion() {
    const found = data.runs[0].evaluation;
    if (data.runs.length > 1 || !found) return h("div");
    const names = found.classes, said = `${number(found.correct)} of ${number(found.samples)} are right after step ${number(found.step)}.`;
    const mistakes = details("Most frequent mistakes", table(["is", "taken for", "times"], found.pairs.map(([label, predicted, count]) => h("tr", {}, h("td", {}, names[label]), h("td", {}, names[predicted]), h("td", {}, number(count))))));
    if (!found.confusion) return card("Confusions", h("p", {class: "soft small"}, `${said} With ${names.length} classes the matrix is not shown.`), mistakes);
    const short = names.every((name) => name.length < 4);
    const rows = found.confusion.map((counts, label) => {
      const sum = counts.reduce((a, b) => a + b, 0) || 1;
      return h("tr", {}, h("th", {}, names[label]), counts.map((count, predicted) => {
        const share = count / sum, shade = count ? 0.08 + 0.72 * Math.sqrt(share) : 0;
        return h("td", {class: count ? null : "zero", title: `${names[label]} taken for ${names[predicted]}: ${count} (${(100 * share).toFixed(1)} %)`, style: count ? `background:rgba(var(--heat),${shade.toFixed(3)})` : null}, number(count));
      }), h("td", {class: "soft"}, `${(100 * counts[label] / sum).toFixed(1)} %`));
    });
    const head = h("tr", {}, h("th", {}, ""), names.map((name) => h("th", {class: short ? "turned short" : "turned"}, name)), h("th", {}, "right"));
    return card("Confusion matrix", h("p", {class: "soft small"}, `${said} Rows are the true classes, columns what the model says.`), h("div", {class: "scroll"}, h("table", {class: "confusion"}, head, rows)), mistakes);
  }
  function wrong() {
    const found = data.runs[0].evaluation;
    if (data.runs.length > 1 || !found || !found.wrong.length) return h("div");
    const figures = found.wrong.map((one) => h("figure", {title: `test sample ${one.index}, loss ${number(one.loss)}`}, one.image ? h("img", {src: one.image, alt: `test sample ${one.index}`}) : null,
      h("figcaption", {}, h("b", {}, found.classes[one.label]), " taken for ", h("b", {}, found.classes[one.predicted]), h("div", {class: "soft"}, `${(100 * one.confidence).toFixed(0)} % sure`))));
    return card("Most wrong", h("p", {class: "soft small"}, "The test samples with the highest loss."), h("div", {class: "wrong"}, figures));
  }
  function options() {
    const run = data.runs[0];
    if (data.runs.length > 1 || !run.config.length) return h("div");
    const row = ([key, value, source], set) => h("tr", {class: set ? "set" : null}, h("th", {}, key), h("td", {}, text(value)), h("td", {class: "soft"}, source));
    const chosen = run.config.filter((option) => option[2] !== "default"), rest = run.config.filter((option) => option[2] === "default");
    return card("Options", chosen.length ? table(["option", "value", "from"], chosen.map((option) => row(option, true))) : h("p", {class: "soft"}, "All options are the defaults."), details(`${rest.length} defaults`, table(["option", "value", "from"], rest.map((option) => row(option, false)))));
  }
  function result() {
    const run = data.runs[0];
    return data.runs.length > 1 || !Object.keys(run.result).length ? h("div") : card("Result", pairs(flat(run.result)));
  }
  function numerics() {
    const run = data.runs[0];
    if (data.runs.length > 1 || !Object.keys(run.numerics || {}).length) return h("div");
    return card("Numerics key", h("p", {class: "soft small"}, "What the bits depend on besides the options. Runs with the same key, options and data have the same weights."), pairs(run.numerics));
  }
  function checkpoints() {
    const run = data.runs[0];
    if (data.runs.length > 1 || !run.checkpoints.length) return h("div");
    return card("Checkpoints", table(["checkpoint", "score", "size", "SHA-256 of model.safetensors"], run.checkpoints.map((one) => h("tr", {}, h("td", {}, one.name), h("td", {}, number(one.score)), h("td", {}, bytes(one.num_bytes)), h("td", {class: "mono"}, text(one.sha256))))));
  }

  // ---- the page

  const SECTIONS = {header, tiles, comparison, differences, controls, charts: null, timeline, times, confusion, wrong, options, numerics, result, checkpoints};
  const COLUMNS = [[["confusion"], ["wrong"]], [["options", "numerics"], ["result"]]];
  const shown = {};
  function build() {
    const made = {};
    for (const name of Object.keys(SECTIONS)) made[name] = h("div", name === "charts" ? {id: "charts", class: "charts"} : {"data-part": name});
    for (const name of Object.keys(SECTIONS)) {
      const columns = COLUMNS.find((group) => group.flat().includes(name));
      if (!columns) page.append(made[name]);
      else if (columns[0][0] === name) page.append(h("div", {class: "two"}, columns.map((column) => h("div", {}, column.map((one) => made[one])))));
    }
    page.append(h("footer", {}, `evenstep ${data.version} · curves by uPlot · this page loads nothing from the network`));
    return made;
  }
  const places = build();
  function update() {
    for (const [name, make] of Object.entries(SECTIONS)) {
      if (!make || (name === "controls" && shown.controls)) continue;
      const element = make(), html = element.outerHTML;
      if (shown[name] === html) continue;
      shown[name] = html;
      places[name].replaceChildren(element);
    }
    drawCharts(false);
  }
  update();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts(true));

  if (data.live) {
    let tag = null;
    const ask = async () => {
      const before = connection;
      try {
        const answer = await fetch("data.json", {cache: "no-cache"});
        if (!answer.ok) throw new Error(String(answer.status));
        connection = true;
        if (tag !== answer.headers.get("ETag")) {
          tag = answer.headers.get("ETag");
          data = {...data, runs: (await answer.json()).runs};
          document.title = `evenstep: ${data.runs.map((run) => run.name).join(", ")}`;
          update();
        } else if (before === false) update();
      } catch {
        connection = false;
        update();
      }
      setTimeout(ask, document.hidden ? 5000 : 1000);
    };
    setTimeout(ask, 1000);
  }
})();
