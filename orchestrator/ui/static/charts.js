// The value of a chart under the pointer.
"use strict";
addEventListener("pointermove", (event) => {
  const figure = event.target instanceof Element && event.target.closest("[data-chart]");
  if (!figure) return;
  const points = JSON.parse(figure.dataset.points), plot = figure.querySelector(".plot").getBoundingClientRect();
  const begin = points[0][0], end = points[points.length - 1][0];
  const at = begin + (event.clientX - plot.left) / plot.width * (end - begin);
  const near = points.reduce((best, one) => Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best);
  figure.querySelector("output").textContent = Number(near[1].toPrecision(4)) + " at " + new Date(near[0] * 1000).toLocaleTimeString();
});
