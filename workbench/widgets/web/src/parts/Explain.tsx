import type { ReactNode } from "react";

import { useTrait } from "../hooks";
import { Panel } from "./Panel";

// What limits the chosen pipeline in words, and what twice of each part would give.
export function Explain(): ReactNode {
  const { explain, prices, prices_of: of, problem } = useTrait("figures");
  return (
    <Panel title="Why" name="explain">
      {explain.length === 0 && prices.length === 0 && <p className="wb-note">{problem ? `There are no figures: ${problem}` : "There is nothing to explain yet."}</p>}
      <ul className="wb-sentences">
        {explain.map((sentence) => (
          <li key={sentence}>{sentence}</li>
        ))}
      </ul>
      {prices.length > 0 && (
        <table className="wb-table wb-prices">
          <thead>
            <tr>
              <th scope="col">With</th>
              <th scope="col">{of === "bound" ? "bound on the throughput" : "throughput, simulated"}</th>
              <th scope="col" className="wb-left">
                and then
              </th>
            </tr>
          </thead>
          <tbody>
            {prices.map(({ what, gain, then }) => (
              <tr key={what}>
                <th scope="row">{what}</th>
                <td className="wb-main">{gain}</td>
                <td className="wb-left">{then}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Panel>
  );
}
