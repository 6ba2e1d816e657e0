"use strict";
(() => {
  const root = document.documentElement;
  const colours = ["#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999", "#a6cee3", "#b2df8a", "#fb9a99", "#cab2d6"];
  const LANE = 22, LEFT = 170, TOP = 24, FIELDS = 5;
  const redraws = [];

  const openAll = (open) => document.querySelectorAll("details").forEach((part) => { part.open = open; });
  document.getElementById("open").addEventListener("click", () => openAll(true));
  window.addEventListener("beforeprint", () => openAll(true));
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    redraws.forEach((draw) => draw());
  });

  const seconds = (us) => us >= 1e6 ? (us / 1e6).toFixed(3) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : us + " us";

  document.querySelectorAll("canvas.timeline").forEach((canvas) => {
    const data = JSON.parse(document.getElementById(canvas.dataset.timeline).textContent);
    const said = canvas.nextElementSibling, n = data.numbers, count = n.length / FIELDS;
    let from = 0, to = data.span, chosen = -1, dragged = null;

    const width = () => canvas.clientWidth - LEFT;
    const across = (us) => LEFT + (us - from) / (to - from) * width();
    const draw = () => {
      const sharp = window.devicePixelRatio || 1, height = TOP + LANE * data.lanes.length + 4;
      canvas.style.height = height + "px";
      canvas.width = Math.round(canvas.clientWidth * sharp);
      canvas.height = Math.round(height * sharp);
      const pen = canvas.getContext("2d"), style = getComputedStyle(root);
      pen.setTransform(sharp, 0, 0, sharp, 0, 0);
      pen.clearRect(0, 0, canvas.clientWidth, height);
      pen.font = "12px system-ui, sans-serif";
      pen.fillStyle = style.getPropertyValue("--soft");
      const ticks = Math.min(Math.max(Math.floor(width() / 110), 1), 5);
      for (let tick = 0; tick <= ticks; tick++) {
        const us = from + (to - from) * tick / ticks;
        pen.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center";
        pen.fillText(seconds(Math.round(us)), Math.min(across(us), canvas.clientWidth - 2), 14);
      }
      pen.textAlign = "left";
      data.lanes.forEach((name, lane) => pen.fillText(name, 4, TOP + LANE * lane + 15));
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, 0, width(), height);
      pen.clip();
      for (let event = 0; event < count; event++) {
        const [lane, kind, , start, us] = n.slice(event * FIELDS, event * FIELDS + FIELDS);
        if (start > to || start + us < from) continue;
        const left = across(start), wide = Math.max(us / (to - from) * width(), 0.5);
        pen.fillStyle = colours[kind % colours.length];
        pen.fillRect(left, TOP + LANE * lane + 2, wide, LANE - 4);
        if (event === chosen) {
          pen.strokeStyle = style.getPropertyValue("--ink");
          pen.lineWidth = 2;
          pen.strokeRect(left, TOP + LANE * lane + 2, wide, LANE - 4);
        }
      }
      pen.restore();
    };
    const show = (first, last) => {
      const wide = Math.min(Math.max(last - first, 10), data.span);
      from = Math.min(Math.max(first, 0), data.span - wide);
      to = from + wide;
      draw();
    };
    const zoom = (factor, at) => show(at - (at - from) * factor, at + (to - at) * factor);
    const tell = (event) => {
      chosen = event;
      const at = event * FIELDS;
      said.textContent = event < 0 ? "" : `${data.lanes[n[at]]}: ${data.kinds[n[at + 1]]}, ${data.names[n[at + 2]]}, from ${seconds(n[at + 3])}, for ${seconds(n[at + 4])}`;
      draw();
    };
    const found = (x, y) => {
      const lane = Math.floor((y - TOP) / LANE), us = from + (x - LEFT) / width() * (to - from), near = (to - from) / width();
      for (let event = 0; event < count; event++) {
        const at = event * FIELDS;
        if (n[at] === lane && us >= n[at + 3] - near && us <= n[at + 3] + n[at + 4] + near) return event;
      }
      return -1;
    };
    canvas.addEventListener("wheel", (turn) => {
      if (turn.offsetX < LEFT) return;
      turn.preventDefault();
      zoom(turn.deltaY > 0 ? 1.25 : 0.8, from + (turn.offsetX - LEFT) / width() * (to - from));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (down) => { dragged = [down.offsetX, from, to]; });
    canvas.addEventListener("pointerup", () => { dragged = null; });
    canvas.addEventListener("pointerleave", () => { dragged = null; });
    canvas.addEventListener("pointermove", (moved) => {
      if (dragged === null) { tell(found(moved.offsetX, moved.offsetY)); return; }
      const by = (moved.offsetX - dragged[0]) / width() * (dragged[2] - dragged[1]);
      show(dragged[1] - by, dragged[2] - by);
    });
    canvas.addEventListener("keydown", (pressed) => {
      const step = (to - from) / 5, middle = (from + to) / 2;
      const moves = {
        "+": () => zoom(0.8, middle), "=": () => zoom(0.8, middle), "-": () => zoom(1.25, middle), "0": () => show(0, data.span),
        ArrowLeft: () => show(from - step, to - step), ArrowRight: () => show(from + step, to + step),
        n: () => tell((chosen + 1) % count), p: () => tell((chosen + count - 1) % count),
      };
      if (!(pressed.key in moves) || pressed.ctrlKey || pressed.metaKey) return;
      pressed.preventDefault();
      moves[pressed.key]();
    });
    window.addEventListener("resize", draw);
    redraws.push(draw);
    draw();
  });
})();
