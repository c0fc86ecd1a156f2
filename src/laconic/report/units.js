// Numbers in words, for the figures of every page; times and sizes read as those that Python writes into the tables.
"use strict";
const units = (() => {
  const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const TIMES = [["h", 3600], ["min", 60], ["s", 1]];

  const count = (value) => Math.round(value).toLocaleString("en-US");
  const percent = (value) => `${Math.round(100 * value)} %`;
  const ms = (value) => {
    if (value === null) return "?";
    if (value >= 100) return count(value);
    if (value > 0 && value < 0.1) return String(Number(value.toPrecision(2)));
    return value.toFixed(value >= 10 ? 1 : 2);
  };
  // The largest unit of which there are enough: [its name, its size].
  const unit = (known, value, least) => known.find(([, factor]) => value >= least * factor) || known.at(-1);
  const sizeUnit = (most, least = 1) => unit(SIZES, most, least);
  const bytes = (value) => {
    const [name, factor] = sizeUnit(value);
    return `${(value / factor).toFixed(factor === 1 ? 0 : 1)} ${name}`;
  };
  const timeUnit = (most) => unit(TIMES, most, 3);
  const duration = (value, [name, factor] = timeUnit(value)) => `${(value / factor).toFixed(1)} ${name}`;

  return { count, percent, ms, sizeUnit, bytes, timeUnit, duration };
})();
