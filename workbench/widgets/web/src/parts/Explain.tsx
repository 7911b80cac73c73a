import type { ReactNode } from "react";
export function Explain(): ReactNode { return null; }
